"""Code of other authors for Cloudflare's Python Workers, run here unmodified.

None of it is part of this project.
"""
