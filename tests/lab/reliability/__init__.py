"""What happens to packages when runs are killed, disks are full, or runs meet: `python -m tests.lab.reliability`."""
