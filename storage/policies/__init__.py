"""Row policies: admission, scores, expiry and eviction of rows."""
