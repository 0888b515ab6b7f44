"""The drafter's KV on a rank: its layout, heads, routes and facts, and copies of its rows."""
