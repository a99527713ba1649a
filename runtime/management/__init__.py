"""Operations on a site while it runs: the models that it serves, and downloads."""
