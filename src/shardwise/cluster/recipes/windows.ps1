# shardwise cluster recipe windows | Out-File register.ps1; .\register.ps1        (in an administrator's PowerShell)
# Ray calls Windows machines in a cluster experimental; WSL 2 with mirrored networking counts as Linux and works better.
$$action = New-ScheduledTaskAction -Execute "$SHARDWISE" -Argument "cluster start --foreground"
$$trigger = New-ScheduledTaskTrigger -AtLogOn
$$settings = New-ScheduledTaskSettingsSet -AllowStartIfOnBatteries -DontStopIfGoingOnBatteries -RestartCount 3 -RestartInterval (New-TimeSpan -Minutes 1) -ExecutionTimeLimit 0
[Environment]::SetEnvironmentVariable("SHARDWISE_STATE", "$STATE", "User")
Register-ScheduledTask -TaskName "shardwise" -Action $$action -Trigger $$trigger -Settings $$settings
New-NetFirewallRule -DisplayName "shardwise" -Direction Inbound -Protocol TCP -LocalPort 7700-7799 -Action Allow -Profile Private
