"""One script per claim. Each prints ratios against a peer or a limit measured in the same run, and
writes JSON to benchmarks/results."""
