"""A small network learns from a large one: soft targets of a teacher that runs without gradients."""

import torch
import torchvision
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

device = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
print(f"Using {device} device")


def train_knowledge_distillation(teacher, student, loader, epochs, learning_rate, temperature, soft_weight, ce_weight, device):
    ce_loss = nn.CrossEntropyLoss()
    optimizer = optim.Adam(student.parameters(), lr=learning_rate)
    teacher.eval()
    student.train()
    for epoch in range(epochs):
        running_loss = 0.0
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            with torch.no_grad():
                teacher_logits = teacher(inputs)
            student_logits = student(inputs)
            soft_targets = nn.functional.softmax(teacher_logits / temperature, dim=-1)
            soft_prob = nn.functional.log_softmax(student_logits / temperature, dim=-1)
            soft_loss = torch.sum(soft_targets * (soft_targets.log() - soft_prob)) / soft_prob.size()[0] * (temperature**2)
            loss = soft_weight * soft_loss + ce_weight * ce_loss(student_logits, labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        print(f"Epoch {epoch + 1}/{epochs}, Loss: {running_loss / len(loader)}")


def test(model, loader, device):
    model.to(device)
    model.eval()
    correct, total = 0, 0
    with torch.inference_mode():
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            _, predicted = torch.max(model(inputs).data, 1)
            total += labels.size(0)
            correct += (predicted == labels).sum().item()
    accuracy = 100 * correct / total
    print(f"Test Accuracy: {accuracy:.2f}%")
    return accuracy


if __name__ == "__main__":
    train_loader = DataLoader(
        TensorDataset(torch.rand(512, 3, 224, 224), torch.randint(0, 100, (512,))), batch_size=64, shuffle=True
    )
    test_loader = DataLoader(TensorDataset(torch.rand(128, 3, 224, 224), torch.randint(0, 100, (128,))), batch_size=64)
    torch.manual_seed(42)
    teacher = torchvision.models.resnet50(weights=None, num_classes=100).to(device)
    student = torchvision.models.mobilenet_v2(weights=None, num_classes=100).to(device)
    print(f"teacher {sum(p.numel() for p in teacher.parameters()):,}, student {sum(p.numel() for p in student.parameters()):,}")
    train_knowledge_distillation(teacher, student, train_loader, 2, 0.001, 2, 0.25, 0.75, device)
    test(student, test_loader, device)
