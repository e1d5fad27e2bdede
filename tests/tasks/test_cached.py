from tasks import cached


def test_a_server_that_went_away_does_not_stop_the_stage(monkeypatch):
    calls = []

    def refuse(*_, **__):
        calls.append(1)
        raise ConnectionError("refused")

    monkeypatch.setattr(cached, "create_progress_artifact", refuse)
    report = cached._ProgressReporter("train")
    for done in range(101):
        report(done, 100, "loss 1.0")
    assert len(calls) == 1


def test_progress_is_sent_in_steps_and_at_the_end(monkeypatch):
    sent = []
    monkeypatch.setattr(cached, "create_progress_artifact", lambda percent, **_: sent.append(percent) or "id")
    monkeypatch.setattr(cached, "update_progress_artifact", lambda _, percent: sent.append(percent))
    report = cached._ProgressReporter("train")
    for done in range(1001):
        report(done, 1000, "loss 1.0")
    assert sent[0] == 0
    assert sent[-1] == 100
    assert len(sent) <= 22
