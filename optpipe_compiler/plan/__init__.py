"""How a schedule is searched for; compiler.py has the order of the phases."""
