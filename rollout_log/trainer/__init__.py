"""What the plug-ins for vime and slime share.

`host` is what differs between the two; `session` the log of this process; `sample` how a rollout grows into
the trainer's sample; `generate` the generate function itself; `metrics` the end of a step. The plug-ins,
`rollout_log.vime` and `rollout_log.slime`, are these with one host or the other.
"""
