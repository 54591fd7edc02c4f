"""Samples in other people's formats: traces, tables, lines. Each module writes one.

A module has `write(samples, path, options)`. It may read every sample once, in order, and holds no more
of them than it must; what it needs from outside is imported in there.
"""
