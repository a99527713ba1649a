"""The zygotes of a site's functions: which there are, and what they start with."""
