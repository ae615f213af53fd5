"""What planning sees: the integer problem, placements, planned schedules, the times of a given order, bounds."""
