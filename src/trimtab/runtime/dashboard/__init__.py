"""The dashboard's server: one page on loopback that receives changes. What it shows is made in `render/html/dashboard`."""
