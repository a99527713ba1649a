"""The pool of a site's zygotes, their number, and the files with which they start."""
