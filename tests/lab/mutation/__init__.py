"""Planted errors in rewrites: does the equivalence check notice them?"""
