"""OptPipe: a schedule compiler for pipeline-parallel training."""

import sys

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:  # `python -m optpipe_compiler.cli`, being looked up
    sys.path.append(sys.path.pop(0))  # the current folder: what lies there must not stand in for other modules
