"""Reports on compiled code: its graphs and collectives, the work of the passes, and the predicted cost.

report = shardcompile.explain(model, x)     # compiles and runs once
print(report)

with shardcompile.capture() as report:      # around code that compiles
    train_step(batch)
"""

from shardcompile.inspect.capture import STAGES as STAGES
from shardcompile.inspect.capture import capture as capture
from shardcompile.inspect.data import Compilation as Compilation
from shardcompile.inspect.data import GraphReport as GraphReport
from shardcompile.inspect.data import IssuedCollective as IssuedCollective
from shardcompile.inspect.data import PassStep as PassStep
from shardcompile.inspect.data import Span as Span
from shardcompile.inspect.data import TracedCollective as TracedCollective
from shardcompile.inspect.explain import explain as explain
from shardcompile.inspect.report import Report as Report
