"""Measurements; nothing here is asserted."""
