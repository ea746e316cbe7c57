"""The networks that are trained, one file each, named after its workload and with a `WORKLOAD`."""
