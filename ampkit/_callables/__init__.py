"""Modules and functions that are captured one by one."""
