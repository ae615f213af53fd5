"""OptPipe: a schedule compiler for pipeline-parallel training."""

__version__ = "0.1.0"
