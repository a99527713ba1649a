"""Operations on a running site: the models that it serves, and downloads."""
