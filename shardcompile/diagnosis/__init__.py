"""Detects ranks that wait for one another without end, and ends their waits with an error.

Before a collective each rank records it: kind, dtype, sizes (`recorded_calls`). All ranks of the group must record the
same. A hash of the record is the tag of all messages, so calls that differ never receive each other's rows.

A thread of each rank writes the state of its rank to the key-value store (`states`). If its rank waits for long, the
thread reads the states of the other ranks, and decides whether the wait can end (`deadlock`). If it cannot, the thread
publishes the diagnosis and closes the connections between ranks (`connections`). That ends each wait with an error,
which says what the ranks did (`watcher`).

NCCL calls return before they are complete, and the device waits (`queued`). For these the thread aborts the process
groups, and raises the error in the main thread wherever it is (`main_thread`).
"""

from shardcompile.diagnosis.recorded_calls import Call as Call
from shardcompile.diagnosis.recorded_calls import enter as enter
