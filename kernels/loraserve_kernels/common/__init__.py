"""Values that both devices' kernels share: sites, modules, formats, sizes and plans."""
