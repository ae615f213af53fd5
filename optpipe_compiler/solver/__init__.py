"""Exact search with CP-SAT. The only room that imports ortools; `search` runs it in a child process."""
