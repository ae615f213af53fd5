"""Questions that take several plans: how schedules compare, what memory buys, and what binds.

Studies only call the compiler; they never plan themselves. Records go to the view, which shows them.
"""
