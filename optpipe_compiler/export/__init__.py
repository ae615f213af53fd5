"""Schedules in the formats of other tools; sees only the files of this one."""
