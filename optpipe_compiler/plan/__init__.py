"""How a schedule is searched for: see planning.py for the order of it."""
