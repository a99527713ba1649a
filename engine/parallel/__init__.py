"""One model on several ranks: processes that each hold a part of its weights and cache."""
