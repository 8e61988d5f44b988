"""Loads torch before anything else of this package.

With ``TORCH_LOGS=shardcompile`` torch imports all packages below that name at the end of its own import. Where that was
begun by ``import shardcompile``, they would be imported while this package is half made, and fail. So the package looks
for that time as if it had no modules; its loggers are children of the one that torch sets up.
"""

import sys

_package = sys.modules["shardcompile"]
_path = _package.__path__
del _package.__path__
try:
    import torch as torch
finally:
    _package.__path__ = _path
