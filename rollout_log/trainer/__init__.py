"""What the plug-ins for vime and slime share; each of them is this with a `Host` of its own.

`host` is what differs between the two, `session` what a process keeps: settings, log, samples, and which
`weights` the engines have.
A call: `generate`, with `prompt` (its ids), `opening` (what is known at its start), `sample` (how tokens get
into it), `arrays`, and `tally` (what it cost). Functions of others: `recorded`, by their `paths`.
The end of a step: `metrics`, with `closing` (what the fold does not tell) and `storable` (as JSON).
After a crash: `recovery` (what the log has) and `resuming` (how the trainer gets it).
"""
