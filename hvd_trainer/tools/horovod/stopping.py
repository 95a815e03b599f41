"""Changes that let horovodrun tell its ranks to stop, wherever they are, and give them time to save.

As published, it tells those of its own host only, and kills them after 5 s; on other hosts it ends the ssh that
has started them, of which they hear nothing. Here a line says that the way is open, and the way's end that they
shall stop:

    horovodrun -- pipe -- ssh -- sshd -- sh, which reads the pipe's end and sends SIGTERM to the rank
"""

from __future__ import annotations

from hvd_trainer.tools.horovod.source import Replacement

SHELL_EXEC, GLOO_RUN = "horovod/runner/common/util/safe_shell_exec.py", "horovod/runner/gloo_run.py"
TIME = "ranks that shall stop were killed after 5 s, in the middle of a save; torchrun gives them 30 s"
SHELL = (
    "where /bin/sh is bash, which becomes the only command that it is given, horovodrun took the rank for its "
    "shell: it stopped it by SIGSTOP, so that it never heard SIGTERM, and killed it"
)
AFAR = "ranks on other hosts were not told to stop"

STOPPING_CHANGES = (
    Replacement(
        SHELL_EXEC,
        "GRACEFUL_TERMINATION_TIME_S = 5\n",
        "GRACEFUL_TERMINATION_TIME_S = 5\n"
        "# After SIGTERM: who sends it waits so long, and ranks may have to save.\n"
        "PATIENT_TERMINATION_TIME_S = 30\n",
        TIME,
    ),
    Replacement(
        SHELL_EXEC,
        "def terminate_executor_shell_and_children(pid):\n",
        "def terminate_executor_shell_and_children(pid, grace_s=GRACEFUL_TERMINATION_TIME_S, stdin=None):\n",
        TIME,
    ),
    Replacement(
        SHELL_EXEC,
        "    for child in p.children():\n"
        "        try:\n"
        "            child.terminate()\n"
        "        except psutil.NoSuchProcess:\n"
        "            pass\n"
        "\n"
        "    # Wait for graceful termination.\n"
        "    gone, alive = psutil.wait_procs(p.children(), timeout=GRACEFUL_TERMINATION_TIME_S)\n",
        "    children = p.children()\n"
        "    if stdin is not None:\n"
        "        stdin.close()\n"
        "    else:\n"
        "        for child in children:\n"
        "            try:\n"
        "                child.terminate()\n"
        "            except psutil.NoSuchProcess:\n"
        "                pass\n"
        "\n"
        "    # Wait for graceful termination.\n"
        "    gone, alive = psutil.wait_procs(children, timeout=grace_s)\n",
        AFAR,
    ),
    Replacement(
        SHELL_EXEC,
        "def _exec_middleman(command, env, exit_event, stdout, stderr, rw):\n",
        "def _exec_middleman(command, env, exit_event, stdout, stderr, rw, patient, remote):\n",
        TIME,
    ),
    Replacement(
        SHELL_EXEC,
        "    executor_shell = subprocess.Popen(command, shell=True, env=env,\n"
        "                                      stdout=stdout_w, stderr=stderr_w)\n",
        "    executor_shell = subprocess.Popen(command + '\\nexit $?', shell=True, env=env,\n"
        "                                      stdin=subprocess.PIPE if remote else None,\n"
        "                                      stdout=stdout_w, stderr=stderr_w)\n"
        "    if remote:\n"
        "        try:\n"
        "            executor_shell.stdin.write(b'\\n')\n"
        "            executor_shell.stdin.flush()\n"
        "        except BrokenPipeError:\n"
        "            pass  # ssh has failed, and says so\n"
        "\n"
        "    def terminate():\n"
        "        grace_s = PATIENT_TERMINATION_TIME_S if patient.is_set() else GRACEFUL_TERMINATION_TIME_S\n"
        "        terminate_executor_shell_and_children(executor_shell.pid, grace_s, executor_shell.stdin)\n",
        SHELL,
    ),
    Replacement(
        SHELL_EXEC,
        "    on_event(exit_event, terminate_executor_shell_and_children, args=(executor_shell.pid,), "
        "daemon=True)\n",
        "    on_event(exit_event, terminate, daemon=True)\n",
        TIME,
    ),
    Replacement(
        SHELL_EXEC,
        "        os.read(r.fileno(), 1)\n        terminate_executor_shell_and_children(executor_shell.pid)\n",
        "        os.read(r.fileno(), 1)\n        terminate()\n",
        AFAR,
    ),
    Replacement(
        SHELL_EXEC,
        '            prefix_output_with_timestamp=False):\n    """\n    Execute the given command',
        '            prefix_output_with_timestamp=False, remote=False):\n    """\n    Execute the given command',
        AFAR,
    ),
    Replacement(
        SHELL_EXEC,
        "    exit_event = _create_event(ctx)\n",
        "    exit_event = _create_event(ctx)\n    patient = _create_event(ctx)\n",
        TIME,
    ),
    Replacement(
        SHELL_EXEC,
        "                                                          (r, w)))\n",
        "                                                          (r, w), patient, remote))\n",
        TIME,
    ),
    Replacement(
        SHELL_EXEC,
        "    for event in events:\n        on_event(event, exit_event.set, stop=stop, silent=True)\n",
        "\n"
        "    def end(event):\n"
        "        if getattr(event, 'patient', False):\n"
        "            patient.set()\n"
        "        exit_event.set()\n"
        "\n"
        "    for event in events:\n        on_event(event, end, args=(event,), stop=stop, silent=True)\n",
        TIME,
    ),
    Replacement(
        GLOO_RUN,
        "    def set_event_on_signal(signum, frame):\n        event.set()\n",
        "    def set_event_on_signal(signum, frame):\n"
        "        # Who types Ctrl-C does not wait.\n"
        "        event.patient = signum == signal.SIGTERM\n"
        "        event.set()\n",
        TIME,
    ),
    Replacement(
        GLOO_RUN,
        "def _exec_command_fn(settings):\n",
        "# Where there is nothing to read, as ssh was told so, there is no first line, and no signal.\n"
        "TOLD_BY_STDIN = (\n"
        "    'exec 3<&0; {command} < /dev/null 3<&- & rank=$!; '\n"
        "    '{{ read -r line <&3 && {{ read -r line <&3; kill $rank; }}; }} 2> /dev/null & reader=$!; '\n"
        "    'wait $rank; code=$?; kill $reader 2> /dev/null; exit $code')\n"
        "\n\n"
        "def _exec_command_fn(settings):\n",
        AFAR,
    ),
    Replacement(
        GLOO_RUN,
        "        if host_address not in local_addresses:\n"
        "            local_command = quote('cd {pwd} > /dev/null 2>&1 ; {command}'\n"
        "                                  .format(pwd=os.getcwd(), command=command))\n",
        "        remote = host_address not in local_addresses and not env_util.is_kubeflow_mpi()\n"
        "        if host_address not in local_addresses:\n"
        "            if remote:\n"
        "                command = 'exec sh -c ' + quote(TOLD_BY_STDIN.format(command=command))\n"
        "            local_command = quote('cd {pwd} > /dev/null 2>&1 ; {command}'\n"
        "                                  .format(pwd=os.getcwd(), command=command))\n",
        AFAR,
    ),
    Replacement(
        GLOO_RUN,
        "                                                "
        "prefix_output_with_timestamp=settings.prefix_output_with_timestamp)\n",
        "                                                "
        "prefix_output_with_timestamp=settings.prefix_output_with_timestamp,\n"
        "                                                remote=remote)\n",
        AFAR,
    ),
)
