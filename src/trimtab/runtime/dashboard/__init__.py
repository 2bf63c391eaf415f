"""The dashboard server: one page on loopback that receives changes; its content is made in `render`."""
