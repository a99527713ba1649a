"""Send each request to the site that will answer it first, and continue its answer when a site fails."""
