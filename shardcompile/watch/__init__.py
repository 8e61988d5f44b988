"""Nobody is left waiting: finds ranks that wait for one another without end, and ends their wait with an error.

Each collective is entered by what all ranks of its group have to state alike (`calls`). Messages between two ranks
carry a number made of it as their tag, so that calls that differ never take one another's rows. A thread of each rank
tells the others what its rank is doing (`states`), through the key-value store. When its own rank waits for long, it
looks at what the others are doing, and finds out whether that wait can end (`verdict`). If not, all ranks are told, and
the connections between them are closed (`connections`), which ends every wait; what is raised then says who did what
(`watcher`).
"""

from shardcompile.watch.calls import Call as Call
from shardcompile.watch.calls import enter as enter
