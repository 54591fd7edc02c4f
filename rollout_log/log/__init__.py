"""The log: a directory of segments that any number of processes append to and anyone can read.

    log = Log.open("runs/today")                    # this process's own folder in it
    sample = log.create(Opened(key="t1-abc"))       # an ordinal, unique within the writer
    log.append(sample, 0, [opened, requested, …])   # never blocks, never raises unless strict
    await log.flush(sample)                         # on disk now

    with LogReader.open("runs/today") as reader:
        for entry in reader.samples(): ...
        rollout = reader.rollout("t1-abc")
"""
