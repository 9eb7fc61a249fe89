"""Random valid MIL programs, rewritten with the equivalence check on."""
