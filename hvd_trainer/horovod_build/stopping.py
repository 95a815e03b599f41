"""Changes that let horovodrun tell its ranks to stop, wherever they are, and give them time to save.

As published, it tells those of its own host only, and kills them after 5 s; on other hosts it ends the ssh that
has started them, of which they hear nothing. Here a line says that the way is open, and the way's end that they
shall stop:

    horovodrun -- pipe -- ssh -- sshd -- sh, which reads the pipe's end and sends SIGTERM to the rank
"""

from __future__ import annotations

from hvd_trainer.horovod_build.source import Replacement

SHELL_EXEC, GLOO_RUN = "horovod/runner/common/util/safe_shell_exec.py", "horovod/runner/gloo_run.py"
TIME = "ranks that shall stop were killed after 5 s, in the middle of a save; torchrun gives them 30 s"
SHELL = (
    "where /bin/sh is bash, which becomes the only command that it is given, horovodrun took the rank for its "
    "shell: it stopped it by SIGSTOP, so that it never heard SIGTERM, and killed it"
)
AFAR = "ranks on other hosts were not told to stop"
LEAK = (
    "five semaphores for each rank, in threads that outlive it by a second, so that Python ended in the middle of "
    "giving them back and said so after the job's last line; a pipe, which was there already, does as well"
)

STOPPING_CHANGES = (
    Replacement(
        SHELL_EXEC,
        "GRACEFUL_TERMINATION_TIME_S = 5\n",
        "GRACEFUL_TERMINATION_TIME_S = 5\n"
        "# After SIGTERM: who sends it waits so long, and ranks may have to save.\n"
        "PATIENT_TERMINATION_TIME_S = 30\n"
        "# What is said to the middleman; the end of the way to it is taken for the first.\n"
        "END, END_PATIENTLY = b'e', b'p'\n",
        TIME,
    ),
    Replacement(
        SHELL_EXEC,
        "def terminate_executor_shell_and_children(pid):\n",
        "def terminate_executor_shell_and_children(pid, grace_s, stdin):\n",
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
        "    for child in children if stdin is None else ():\n"
        "        try:\n"
        "            child.terminate()\n"
        "        except psutil.NoSuchProcess:\n"
        "            pass\n"
        "    if stdin is not None:\n"
        "        stdin.close()\n"
        "\n"
        "    # Wait for graceful termination.\n"
        "    gone, alive = psutil.wait_procs(children, timeout=grace_s)\n",
        AFAR,
    ),
    Replacement(
        SHELL_EXEC,
        "def _exec_middleman(command, env, exit_event, stdout, stderr, rw):\n",
        "def _exec_middleman(command, env, stdout, stderr, rw, remote):\n",
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
        "            pass  # ssh has failed, and says so\n",
        SHELL,
    ),
    Replacement(
        SHELL_EXEC,
        "    # we don't bother stopping the on_event thread, this process sys.exits soon\n"
        "    # so the on_event thread has to be a daemon thread\n"
        "    on_event(exit_event, terminate_executor_shell_and_children, args=(executor_shell.pid,), "
        "daemon=True)\n"
        "\n"
        "    def kill_executor_children_if_parent_dies():\n"
        "        # This read blocks until the pipe is closed on the other side\n"
        "        # due to parent process termination (for any reason, including -9).\n"
        "        os.read(r.fileno(), 1)\n"
        "        terminate_executor_shell_and_children(executor_shell.pid)\n"
        "\n"
        "    in_thread(kill_executor_children_if_parent_dies)\n",
        "    told = threading.Event()\n"
        "\n"
        "    def terminate_when_told():\n"
        "        # This read blocks until the parent process says so, or has ended, by -9, say.\n"
        "        word = os.read(r.fileno(), 1)\n"
        "        told.set()\n"
        "        grace_s = PATIENT_TERMINATION_TIME_S if word == END_PATIENTLY else GRACEFUL_TERMINATION_TIME_S\n"
        "        terminate_executor_shell_and_children(executor_shell.pid, grace_s, executor_shell.stdin)\n"
        "\n"
        "    in_thread(terminate_when_told)\n",
        LEAK,
    ),
    Replacement(
        SHELL_EXEC,
        "    exit_code = executor_shell.wait()\n    if exit_code < 0:\n",
        "    exit_code = executor_shell.wait()\n"
        "    if exit_code == 0 and told.is_set():\n"
        "        # The thread that terminates it may be the one that has learnt its exit code.\n"
        "        exit_code = -signal.SIGTERM\n"
        "    if exit_code < 0:\n",
        "two threads waited for a rank that was terminated, and if the wrong one was first horovodrun took it "
        "for a success, and returned 0 after Ctrl-C",
    ),
    Replacement(
        SHELL_EXEC,
        "def _create_event(ctx):\n"
        "    # We need to expose this method for internal testing purposes, so we can mock it out to avoid\n"
        "    # leaking semaphores.\n"
        "    return ctx.Event()\n"
        "\n\n",
        "",
        LEAK,
    ),
    Replacement(
        SHELL_EXEC,
        '            prefix_output_with_timestamp=False):\n    """\n    Execute the given command',
        '            prefix_output_with_timestamp=False, remote=False):\n    """\n    Execute the given command',
        AFAR,
    ),
    Replacement(
        SHELL_EXEC,
        "    # When this event is set, signal to middleman to terminate its children and exit.\n"
        "    exit_event = _create_event(ctx)\n"
        "\n",
        "",
        LEAK,
    ),
    Replacement(
        SHELL_EXEC,
        "args=(command, env, exit_event,\n",
        "args=(command, env,\n",
        LEAK,
    ),
    Replacement(
        SHELL_EXEC,
        "                                                          (r, w)))\n",
        "                                                          (r, w), remote))\n",
        AFAR,
    ),
    Replacement(
        SHELL_EXEC,
        "    for event in events:\n        on_event(event, exit_event.set, stop=stop, silent=True)\n",
        "\n"
        "    def end(event=None):\n"
        "        os.write(w.fileno(), END_PATIENTLY if getattr(event, 'patient', False) else END)\n"
        "\n"
        "    for event in events:\n        on_event(event, end, args=(event,), stop=stop, silent=True)\n",
        TIME,
    ),
    Replacement(
        SHELL_EXEC,
        "        # interrupted, send middleman TERM signal which will terminate children\n"
        "        exit_event.set()\n",
        "        # interrupted, tell middleman, which will terminate children\n        end()\n",
        LEAK,
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
