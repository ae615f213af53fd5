"""`optpipe run --rank R --emulate-peers`: one device of a pipeline on its own."""
