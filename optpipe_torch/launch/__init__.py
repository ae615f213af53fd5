"""`optpipe run`: the processes that are ranks, what each does, what it reports."""
