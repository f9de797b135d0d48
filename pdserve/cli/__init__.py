"""The command line: one file per command, and what a person sees.

Exit codes: 0 done, 1 it failed or is not ready, 2 the input was wrong. Errors are one line on stderr: `field: value: fix`.
"""
