"""Programs and corpus that train Ember, the embedded model. Not in the wheel."""
