"""Model file in, plan out; offline."""
