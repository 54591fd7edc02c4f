"""`python -m rollout_log.cli` is `rollout-log`."""

from rollout_log.cli import main

if __name__ == "__main__":
    main()
