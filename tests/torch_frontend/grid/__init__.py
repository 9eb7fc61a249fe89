"""Forms of assignment and arithmetic × ranks × dtypes × fixed and flexible × frontends × targets, against PyTorch."""
