"""Find ranks that wait for one another without end, and end their waits with an error.

Before a collective each rank states it: kind, dtype, sizes (`calls`). All ranks of the group must state the same. A
hash of the statement is the tag of all messages, so calls that differ never receive each other's rows.

A thread of each rank writes its rank's state to the key-value store (`states`). If its rank waits for long, the thread
reads the states of the others, and decides whether the wait can end (`verdict`). If it cannot, the thread tells all
ranks and closes the connections between them (`connections`). That ends each wait with an error, which says what the
ranks did (`watcher`).

Calls of NCCL return before they are complete, and the device waits (`queued`). For these the thread aborts the process
groups, and the main thread gets the error wherever it is (`main_thread`).
"""

from shardcompile.diagnosis.recorded_calls import Call as Call
from shardcompile.diagnosis.recorded_calls import enter as enter
