"""Runs of `train` side by side: tables, files for programs, pictures and one page. docs/compare.md describes it."""
