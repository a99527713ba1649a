"""Measurements of speed and reliability, comparisons with other projects, and their records.

Scenarios talk to whole networks over HTTP; kernels, the engine and routing policies are also measured in-process."""
