"""Scheduler loops, real models on the arena, and the command line."""
