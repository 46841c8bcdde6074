"""Judging drafting methods on recordings, without running a model."""
