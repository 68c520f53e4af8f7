"""Where the time of a device went, from events alone.

- `accountant.Accountant`: gives every second of a device one cause
- `timeline.DeviceTimeline`: the causes of all moments, in bounded memory
"""
