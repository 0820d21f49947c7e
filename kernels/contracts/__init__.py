"""The op contracts by area. ``ops.Ops`` joins them; nothing else should import from here but providers and tests."""
