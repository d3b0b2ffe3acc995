"""Measure an engine: passes, rounds, answers, stages, beside other runtimes; the command is medusa-bench."""
