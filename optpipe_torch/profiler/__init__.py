"""`optpipe profile` on this machine: times and bytes of layers, transfers and messages, measured."""
