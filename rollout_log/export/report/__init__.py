"""A step as one page: a timeline of its samples, and each sample's tokens for a click.

    page = Report(reader, step=12, decode=decode)
    for entry in by_interest(reader.samples(step=12)):
        page.add(entry)
    page.write(Path("report.html"))

The page asks for nothing from anywhere, and runs nothing but its own script (`page`). What stands in it
comes from the log and is hostile: it is embedded as base64, and shown as text alone.
"""

from rollout_log.export.report.data import Report, by_interest

__all__ = ["Report", "by_interest"]
